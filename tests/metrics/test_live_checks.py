"""Which played cells are checked live, and as what."""

from __future__ import annotations

from testbed.metrics.live_checks import CHECK_STEPS, checks, live_twin
from testbed.profiles import load_profile
from testbed.records import StageCosts
from testbed.spec import Calibrated, Cell, Measured, Paced, recipe_of
from tests import synthetic


def played(codec: str, profile: str, **changes: object) -> Cell:
    cell = synthetic.cell(codec, load_profile(profile), steps=40)
    return cell.model_copy(update={"timing": "played", "compute": Calibrated(), **changes})


def costs(*forward_ns: int) -> tuple[StageCosts, ...]:
    return tuple(
        synthetic.stage_costs(forward_ns=ns, backward_ns=2 * ns, clip_ns=5, update_ns=7, codec_ns=1)
        for ns in forward_ns
    )


def test_a_twin_differs_in_its_clock_and_is_held_to_the_calibration() -> None:
    cell = played("int8", "cable", clock="virtual", engine="netem")
    twin = live_twin(cell, "relay", costs(1000, 2000, 1000), cores=2)
    assert (twin.timing, twin.clock, twin.engine) == ("live", "real", "relay")
    assert twin.compute.forward_ns == (1000, 2000, 1000)
    assert twin.compute.backward_ns == (2000, 4000, 2000)
    assert twin.compute.update_ns == 12
    assert twin.compute.dilation == 2  # two cores' worth of maths on two thirds of two cores
    assert recipe_of(twin) == recipe_of(cell)
    assert twin.profiles == cell.profiles


def test_without_a_calibration_a_twin_is_measured_and_a_paced_one_stays_as_it_is() -> None:
    assert live_twin(played("int8", "cable"), "relay").compute == Measured()
    paced = Paced(forward_ns=(5,), backward_ns=(6,), update_ns=7, source="stated")
    assert live_twin(played("int8", "cable", compute=paced), "relay", costs(1, 1, 1), 2).compute == paced


def test_a_twin_of_a_cell_with_checkpoints_has_none() -> None:
    cell = played("int8", "cable")
    kept = cell.model_copy(update={"training": cell.training.model_copy(update={"checkpoint_every": 5})})
    assert live_twin(kept, "relay") == live_twin(cell, "relay")


def test_checks_are_short_shaped_and_as_different_as_can_be() -> None:
    cells = [
        played(codec, profile) for profile in ("datacenter", "consumer-80mbps", "cable") for codec in ("fp32", "int8")
    ]
    chosen = checks(cells, 2, "relay", {}, 2)
    assert list(chosen) == [cells[2].id, cells[5].id]
    for twin in chosen.values():
        assert twin.training.steps == twin.training.warmup_steps + CHECK_STEPS
        assert twin.training.evaluate_every == 0
    assert len(checks(cells, 9, "relay", {}, 2)) == 4
    assert list(checks(cells[:2], 1, "relay", {}, 2)) == [cells[0].id]  # nothing is shaped: better than no check
    zero = [cell.model_copy(update={"codec_cost": "zero"}) for cell in cells]
    assert checks(zero, 2, "relay", {}, 2) == {}
