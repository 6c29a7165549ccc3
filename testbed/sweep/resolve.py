"""One cell from nested tables: names looked up, everything checked that can be checked without starting anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from testbed import devices
from testbed.codecs.catalogue import placement as codecs
from testbed.codecs.catalogue.codec_spec import parse_codec
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import explain
from testbed.jobs.kind import JobKind
from testbed.net.relay.client import refuse_unsupported
from testbed.net.topology import plan_lab
from testbed.play import pipelines, replicas
from testbed.profiles import LinkProfile, load_profile
from testbed.spec import (
    RINGS,
    Calibrated,
    Cell,
    Clock,
    CodecRates,
    Compute,
    DataParallelSpec,
    Engine,
    Measured,
    Paced,
    TextSpec,
)
from testbed.workloads import checkpoints
from testbed.workloads import models as workloads


def resolve_cell(
    fields: Mapping[str, Any],
    engine: Engine,
    where: str,
    clock: Clock = "real",
    load: Callable[[str], LinkProfile] = load_profile,
) -> Cell:
    """Make the cell that the tables describe. UserError, which names the field, for what cannot be run.

    `load` finds a profile by its name; who resolves many cells gives one that remembers.

    A file says `profile` where the cell has profiles, and may name a device where the cell has durations. `engine` is
    that of the real clock, `clock` that of played cells and of live ones whose codecs are to cost nothing. A live cell
    whose compute is `calibrated` is `measured`.
    """
    content = dict(fields)
    if "profiles" in content:
        raise UnknownNameError(f"key of {where}", "profiles", ("profile",))
    for name in ("clock", "engine"):
        if name in content:
            raise SpecError(
                f"{where}: {name} is not stated for each cell; say {name} = ... at the top of the file, or "
                f"--{name} on the command line"
            )
    if not isinstance(content.get("codec"), str):
        raise SpecError(
            f"{where}: codec must be a text, for example int8 or ef(topk(0.1)); found {content.get('codec')!r}"
        )
    content["profiles"] = [profile.model_dump() for profile in _profiles(content.pop("profile", None), where, load)]
    compute = content.pop("compute", None)
    if compute is None:
        raise SpecError(f"{where}: compute is not stated; for example compute.mode = 'calibrated'")
    if "job" in content:
        neutral = {"learning_rate": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "clip_norm": 1.0}
        content.setdefault("optimiser", neutral)  # a job that learns nothing need not say how
    if ("job" in content or isinstance(content.get("data"), dict)) and isinstance(content.get("pipeline", {}), dict):
        one = {"stages": 1, "microbatches": 1, "schedule": "gpipe", "in_flight": 1}
        content["pipeline"] = {**one, **content.get("pipeline", {})}
    workload = content.get("workload")
    if isinstance(workload, dict) and isinstance(workload.get("model"), str) and "images" not in workload:
        family = workloads.model_size(workload["model"]).family
        content["workload"] = {"family": family, "weights": checkpoints.weights_digest(workload["model"]), **workload}
    try:
        # Through JSON, so that 1 and 1.0 and true are not confused, and strictly: no text is taken for a number.
        timing = content.setdefault("timing", "played")
        own_pace = {"mode": "measured" if timing == "live" else "calibrated"}
        # Live codecs that cost what they cost are for the real clock, but in data parallel training.
        codecs_fit = "data" in content or content.get("codec_cost") == "zero"
        virtual = clock == "virtual" and (timing == "played" or codecs_fit)
        means = {"engine": "netem" if virtual else engine, "clock": "real"}
        # What it costs on a device is filled in below, with the device's rates.
        changes: dict[str, Any] = {
            "clock": "virtual" if virtual else "real",
            "codec_cost": content.get("codec_cost", "host"),
        }
        text = json.dumps({**content, **means, "compute": own_pace, "codec_cost": "host"})
        cell = Cell.model_validate_json(text, strict=True)
        workloads.check_workload(cell.workload, cell.pipeline.stages, cell.pipeline.layers)
        if isinstance(cell.workload, TextSpec):
            checkpoints.check_weights(cell.workload)
        # After the check: it takes a workload that is known to be one.
        durations = _durations(cell, compute, where)
        if timing == "live" and isinstance(durations, Calibrated):
            durations = Measured()
        changes["codec_rates"] = _codec_rates(content.get("codec_cost"), compute, where)
        # Two texts for the same codecs are one cell.
        codec = codecs.parse_placement(cell.codec).over(cell.boundaries)
        if isinstance(data := cell.parallelism, DataParallelSpec):
            changes["data"] = _checked_data(data, codec, where)
            _check_data_means(cell, data, durations, changes, where)
        cell = Cell(**dict(cell) | changes | {"codec": codec.text, "compute": durations})
    except ValidationError as error:
        raise explain(error, Cell, where) from None
    _check_network(cell, where)
    _check_frozen(cell, where)
    if cell.codec_rates is not None:
        try:  # before anything is trained: nobody can say what some codecs cost on a device
            if isinstance(cell.parallelism, DataParallelSpec):
                replicas.node_times(cell)
            else:
                pipelines.stage_cost(cell, None)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
    if isinstance(cell.parallelism, JobKind) and cell.codec_cost == "device":
        raise SpecError(
            f"{where}: in a job of a table `job` codecs cost nothing or what they cost here: set codec_cost to 'zero' "
            "or 'host'"
        )
    if codec.measures and cell.timing == "played":
        raise SpecError(
            f"{where}: codec {cell.codec} chooses by what it measures of its link, so over each link it trains "
            'otherwise and cannot be played; set timing = "live"'
        )
    if cell.pipeline.schedule == "1f1b" and cell.pipeline.in_flight < min(
        cell.pipeline.stages, cell.pipeline.microbatches
    ):
        raise SpecError(
            f"{where}: pipeline.in_flight is {cell.pipeline.in_flight}; {cell.pipeline.stages} stages need at least "
            f"{min(cell.pipeline.stages, cell.pipeline.microbatches)} micro-batches in flight to be busy at once"
        )
    return cell


def _durations(cell: Cell, compute: Any, where: str) -> Compute:
    """Return what a cell's compute asks for; in data parallel training of one micro-batch of any worker."""
    match cell.parallelism:
        case JobKind():
            return devices.compute_of_job(compute, where)
        case DataParallelSpec() as data:
            parts = data.batch_parts * cell.pipeline.microbatches
            one = cell.pipeline.model_copy(update={"microbatches": parts})
            return devices.compute_of(compute, cell.workload, one, where, workers=data.workers)
        case _:
            return devices.compute_of(compute, cell.workload, cell.pipeline, where)


def _checked_data(data: DataParallelSpec, messages: codecs.Placement, where: str) -> DataParallelSpec:
    """Return what a cell says of data parallel training, the text of its codec made canonical. SpecError for codecs
    that cannot do it.
    """
    answer = None if data.answer is None else parse_codec(data.answer)
    sent = [messages.at(worker, "backward") for worker in range(data.workers)]
    for spec in (*sent, *([] if answer is None else [answer])):
        for part in spec.parts():
            if part.row.hook or part.row.pairs or part.row.measures:
                raise SpecError(
                    f"{where}: codec {spec.text}: {part.name} goes by activations or by what a link carries, and here "
                    "gradients are sent; take one that needs neither, for example ef(topk(0.01))"
                )
    if data.exchange == "all-reduce" and (len(set(sent)) > 1 or not sent[0].row.linear):
        raise SpecError(
            f"{where}: data.exchange is 'all-reduce', whose partial sums are encoded at every hop, and codec "
            f"{messages.text} does more than round each value; take fp32 or bf16, or exchange = 'all-gather' or 'star'"
        )
    if data.arrivals is not None and answer is not None and not answer.row.linear:
        raise SpecError(
            f"{where}: data.answer is {answer.text!r}, and with data.arrivals a server answers with weights, each "
            "worker at other steps; take one that rounds and remembers nothing: fp32, bf16 or fp16"
        )
    return data.model_copy(update={"answer": None if answer is None else answer.text})


def _check_data_means(
    cell: Cell, data: DataParallelSpec, durations: object, changes: Mapping[str, Any], where: str
) -> None:
    """Raise SpecError for a cell of data parallel training that nothing here can make."""
    if cell.played_steps is not None:
        raise SpecError(f"{where}: data parallel training is played as long as it was trained: leave played_steps out")
    if cell.timing == "live" and not isinstance(durations, Paced):
        raise SpecError(
            f"{where}: data parallel training is run live with stated durations: say compute.mode = 'paced', with a "
            "device or durations; or set timing = 'played'"
        )
    if cell.timing == "live" and (changes["clock"], changes["codec_cost"]) == ("real", "device"):
        raise SpecError(
            f"{where}: live on the real clock codecs cost what they cost here, or nothing: set codec_cost = 'host' or "
            "'zero'; or run it on the virtual clock (--clock virtual)"
        )
    for name in ("deco", "arrivals"):
        if getattr(data, name) is not None and cell.timing == "played":
            raise SpecError(
                f"{where}: data.{name} goes by what links carry, so over each link it trains otherwise and cannot be "
                'played; set timing = "live"'
            )
    if data.deco is not None and data.exchange in RINGS:
        raise SpecError(
            f"{where}: data.deco has one node tell all others what it chooses, and with data.exchange "
            f"{data.exchange!r} a worker speaks with two of them; set exchange = 'star' or 'all-to-all'"
        )
    if cell.timing == "live" and cell.training.target_loss:
        raise SpecError(
            f"{where}: workers of data parallel training do not meet at each step, so live none can tell the others "
            "that a loss was reached; leave training.target_loss out, or set timing = 'played'"
        )


def _check_frozen(cell: Cell, where: str) -> None:
    """Raise SpecError where what workers send cannot be made from the step before's aggregate, as it then must be."""
    frozen, data = cell.optimiser.frozen_after, cell.data
    if frozen is not None and (
        data is None or data.outer is not None or data.deco is not None or max(data.staleness) > 0
    ):
        raise SpecError(
            f"{where}: optimiser.frozen_after is {frozen}, after which workers send first moments that go on from the "
            "step before's; that takes data parallel training with data.staleness = 0, and neither data.outer nor "
            "data.deco: set these, or leave frozen_after out"
        )


def _codec_rates(rule: Any, compute: Any, where: str) -> CodecRates | None:
    """Return the rates of the device that codecs are to cost what they cost on; None by another rule."""
    if rule != "device":
        return None
    name = compute.get("device") if isinstance(compute, Mapping) else None
    if not isinstance(name, str):
        raise SpecError(
            f"{where}: codec_cost is 'device', and compute names no device; say compute.mode = 'paced' with "
            "compute.device, or take 'host' or 'zero'"
        )
    device = devices.load_device(name)
    rates = devices.rates_of(device)
    return CodecRates(
        bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s, operations_per_s=rates.operations_per_s, source=device.name
    )


def _profiles(names: Any, where: str, load: Callable[[str], LinkProfile]) -> list[LinkProfile]:
    """Load the profiles of a cell's links, from one name, or of a list of names."""
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise SpecError(f"{where}: profile must be a name, or a list of names, one a link; found {names!r}")
    known = {name: load(name) for name in dict.fromkeys(listed)}
    return [known[name] for name in listed]


def _check_network(cell: Cell, where: str) -> None:
    """Check what the lab itself would find out: that it can be laid out, and that its engine can do every pipe."""
    try:
        plan_lab(cell.topology, cell.links, cell.nodes, cell.engine)
        for profile in cell.links if cell.engine == "relay" else ():
            for pipe in (profile.up, profile.down):
                refuse_unsupported(pipe)
    except SpecError as error:
        raise SpecError(f"{where}: network {cell.network}: {error}") from None
