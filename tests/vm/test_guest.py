"""What is decided before a guest boots."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import CapabilityError, GuestKernelError, SpecError
from testbed.processors import parse_processors
from testbed.vm import GuestKernel, guest, launch
from testbed.vm.guest_plan import archive, parse_archive

KERNEL = GuestKernel(folder=Path("/nowhere"), version="9.9.9", packages={})


@given(st.integers(1, 64))
def test_memory_is_read_as_the_kernel_reads_it(number: int) -> None:
    assert guest.memory_bytes(f"{number}G") == guest.memory_bytes(f"{number * 1024}M") == number << 30


@pytest.mark.parametrize("text", ["", "4", "4g", "4 G", "4GB", "-4G", "64M", "0G", "1.5G", "G"])
def test_memory_that_is_none(text: str) -> None:
    with pytest.raises(SpecError, match="'4G' or '512M'"):
        guest.memory_bytes(text)


def test_memory_that_no_folder_has_room_for() -> None:
    with pytest.raises(CapabilityError, match=r"MiB free.*--memory"):
        guest.memory_folder(1 << 60)


def test_shared_folders_are_real_unique_and_outer_first(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "link").symlink_to(inner)
    found = guest.shared_folders([tmp_path / "link", inner, tmp_path / "a" / "..", tmp_path])
    assert found == [tmp_path.resolve(), inner.resolve()]


@pytest.mark.parametrize("folder", ["/", "/proc", "/proc/self", "/sys", "/dev", "/nowhere/at/all", "/etc/passwd"])
def test_what_cannot_be_shared(folder: str) -> None:
    with pytest.raises(SpecError, match="cannot share"):
        guest.shared_folders([Path(folder)])


def test_the_kernel_gets_descriptors_that_do_not_overlap() -> None:
    arguments = guest.kernel_arguments("1G")
    lines = [argument for argument in arguments if "fd:" in argument]
    numbers = [
        int(part.removeprefix("fd:")) for line in lines for part in line.partition("=")[2].split(",") if part != "null"
    ]
    numbers += [int(Path(line).name) for line in arguments if line.startswith("initrd=")]
    assert sorted(numbers) == list(range(launch.FIRST_FD, launch.FIRST_FD + 5))
    assert "mem=1G" in arguments


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_dead_kernels_panic_is_shown_however_long_the_trace_behind_it(before: int, behind: int) -> None:
    lines = [
        *["[    0.00] up\r"] * before,
        "[    0.30] Kernel panic - not syncing: out of memory",
        *["[<6>] ?"] * behind,
    ]
    shown = guest.last_lines("\n".join(lines)).split("\n")
    assert len(shown) == min(40, len(lines))
    assert any("panic" in line for line in shown)


def test_no_command() -> None:
    with pytest.raises(SpecError, match="no command"):
        guest.start_guest(KERNEL, [])


def test_a_guest_does_not_run_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(guest.GUEST_VARIABLE, "1")
    with pytest.raises(GuestKernelError, match="already a guest"):
        guest.start_guest(KERNEL, ["true"])


def _stat(idle: dict[int, int]) -> str:
    rows = "".join(f"cpu{cpu} 5 5 5 {ticks} 5 5 5 0 0 0\n" for cpu, ticks in idle.items())
    return f"cpu  9 9 9 9 9 9 9 0 0 0\n{rows}intr 1 2\nctxt 3\n"


@given(st.dictionaries(st.integers(0, 63), st.tuples(st.integers(0, 1000), st.integers(0, 10)), min_size=2), st.data())
def test_the_processors_allowed_stand_in_the_order_of_how_idle_they_were(
    ticks: dict[int, tuple[int, int]], data: st.DataObject
) -> None:
    allowed = data.draw(st.sets(st.sampled_from(sorted(ticks)), min_size=1))
    before = parse_processors(_stat({cpu: start for cpu, (start, _) in ticks.items()}))
    after = parse_processors(_stat({cpu: start + more for cpu, (start, more) in ticks.items()}))
    order = launch.idlest_first(before, after, allowed)
    assert set(order) == allowed
    assert [ticks[cpu][1] for cpu in order] == sorted((ticks[cpu][1] for cpu in allowed), reverse=True)


def test_guests_that_start_together_take_different_processors() -> None:
    first, held = launch.choose_processor([901, 902])
    second, also_held = launch.choose_processor([901, 902])
    third, nothing = launch.choose_processor([901, 902])
    assert also_held is not None
    assert (first, second, third, nothing) == (901, 902, 901, None)
    held.close()
    again, hold = launch.choose_processor([902, 901])
    assert again == 901
    for socket in (hold, also_held):
        socket.close()


@given(st.dictionaries(st.text(), st.text() | st.lists(st.text()) | st.booleans() | st.none()))
def test_a_plan_comes_out_as_it_went_in(plan: dict[str, object]) -> None:
    packed = archive(plan)
    assert len(packed) % 4 == 0
    assert parse_archive(packed) == plan
