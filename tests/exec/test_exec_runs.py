"""Programs in the nodes of a lab, from end to end: what they print, how they end, and that nothing stays."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from testbed.commands import execute
from testbed.errors import UserError
from testbed.exec.order import RESULT, ExecResult
from testbed.export.perfetto import write_observed
from testbed.sweep.environment import hold_machine
from testbed.trace.observations import read_observations, timeline
from tests.timelines import check_events, check_nesting, pairs

REAL = ("--clock", "real", "--engine", "relay", "--no-certify")
VIRTUAL = ("--clock", "virtual", "--memory", "2G")
PATIENCE_S = 180
DDP = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 32))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(8, 64)
for step in range(4):
    begun = time.monotonic_ns()
    optimiser.zero_grad()
    model(inputs).square().mean().backward()
    optimiser.step()
    print("step", step, time.monotonic_ns() - begun, flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _programs_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


def command(folder: Path, flags: Sequence[str], *words: str) -> list[str]:
    return [sys.executable, "-m", "testbed", "exec", "-o", str(folder / "out"), *flags, "--", *words]


def run(folder: Path, flags: Sequence[str], *words: str) -> tuple[subprocess.CompletedProcess[str], ExecResult | None]:
    done = subprocess.run(
        command(folder, flags, *words), cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    path = folder / "out" / RESULT
    return done, ExecResult.model_validate_json(path.read_text()) if path.exists() else None


def shell(folder: Path, script: str, *flags: str) -> tuple[subprocess.CompletedProcess[str], ExecResult]:
    done, result = run(folder, (*REAL, *flags), "sh", "-c", script)
    assert result is not None, done.stderr
    return done, result


@pytest.mark.root
def test_every_node_runs_it_with_its_own_name_and_address(tmp_path: Path) -> None:
    done, result = shell(tmp_path, 'echo "$TESTBED_NODE of $TESTBED_NODES: {node} at $TESTBED_ADDRESS = {address}"')
    assert done.returncode == result.status == 0
    for number, node in enumerate(result.nodes):
        assert f"{node.name}" in done.stdout
        assert f"{number} of 2: {number} at {node.address} = {node.address}" in done.stdout
        assert (tmp_path / "out" / f"{node.name}.log").read_text().endswith(f"= {node.address}\n")
    assert f"of 2: 0 at {result.nodes[0].address}" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.root
@pytest.mark.parametrize("loads", ["", "import torch\n"], ids=["as it is", "forked"])
def test_a_node_has_a_hostname_that_the_others_can_look_up(tmp_path: Path, loads: str) -> None:
    """Programs tell others where they are by their hostname: torchft, Spark, MPI."""
    (tmp_path / "name.py").write_text(
        f"import socket\n{loads}print('I am', socket.gethostname(), socket.gethostbyname(socket.gethostname()))\n"
    )
    before = socket.gethostname()
    done, result = run(tmp_path, REAL, sys.executable, "name.py")
    assert result is not None, done.stderr
    for node in result.nodes:
        assert f"I am {node.name} {node.address}" in done.stdout
    assert socket.gethostname() == before


@pytest.mark.root
def test_who_sent_how_much_to_whom(tmp_path: Path) -> None:
    """By TCP's own counters: exactly what was written, each way."""
    talk = tmp_path / "talk.py"
    talk.write_text(
        "import os, socket, time\n"
        "first = os.environ['TESTBED_ADDRESSES'].split(',')[0]\n"
        "if os.environ['TESTBED_NODE'] == '0':\n"
        "    with socket.create_server((first, 4000)) as server:\n"
        "        peer, _ = server.accept()\n"
        "        received = sum(len(part) for part in iter(lambda: peer.recv(1 << 16), b''))\n"
        "        peer.sendall(b'x' * 1234)\n"
        "        peer.close(); print('received', received)\n"
        "else:\n"
        "    while True:\n"
        "        try: peer = socket.create_connection((first, 4000)); break\n"
        "        except OSError: time.sleep(0.05)\n"
        "    peer.sendall(b'y' * 50000); peer.shutdown(socket.SHUT_WR)\n"
        "    print('answered', sum(len(part) for part in iter(lambda: peer.recv(1 << 16), b'')))\n"
        "    time.sleep(0.5)\n"
    )
    done, result = run(tmp_path, (*REAL, "--profile", "datacenter"), sys.executable, "talk.py")
    assert result is not None, done.stderr
    assert "received 50000" in done.stdout
    sent = {(talk.source, talk.target): talk for talk in result.talks}
    assert (sent[1, 0].payload_bytes, sent[0, 1].payload_bytes) == (50_000, 1_234)
    assert result.links["node-1"]["up"].bytes > 50_000


@pytest.mark.root
@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("exit $((3 * {node}))", 3, "node-1 ended with status 3"),
        ("test {node} = 0 && exit 7; sleep 60", 7, "node-1 still ran 30 s later and was terminated"),
        ("kill -9 $$", 137, "status 137"),
        ("no-such-program", 127, "not found"),
    ],
    ids=["status", "the others hang", "signal", "missing"],
)
@pytest.mark.slow
def test_the_exit_status_is_that_of_the_first_node_that_failed(
    tmp_path: Path, script: str, status: int, said: str
) -> None:
    done, result = shell(tmp_path, script)
    assert done.returncode == result.status == status
    assert said in done.stdout


@pytest.mark.root
def test_what_programs_leave_behind_is_named_and_ended(tmp_path: Path) -> None:
    mark = f"4{os.getpid() % 10_000:04d}.5"
    done, result = shell(tmp_path, f"(setsid sleep {mark} &) ; (setsid sleep {mark} &) ; exec >&- 2>&-")
    assert done.returncode == 0
    assert "left processes behind, which were terminated: sleep" in done.stdout
    assert all(node.left == ("sleep", "sleep") for node in result.nodes)
    assert (tmp_path / "out" / "report.html").read_text().count("<td>sleep (2)</td>") == 2
    assert not running(mark)


@pytest.mark.root
def test_a_program_that_hangs_is_ended_at_the_time_limit(tmp_path: Path) -> None:
    done, result = shell(tmp_path, "echo before; sleep 1000", "--time-limit", "1")
    assert done.returncode == result.status == 124
    assert "stopped at the time limit of 1 s: node-0, node-1 still ran" in done.stdout


@pytest.mark.root
def test_a_megabyte_arrives_whole(tmp_path: Path) -> None:
    done, result = shell(tmp_path, "seq 200000; printf 'no end of line'")
    assert done.returncode == 0
    for node in result.nodes:
        lines = (tmp_path / "out" / f"{node.name}.log").read_text().splitlines()
        assert [line.split(" ", 1)[1] for line in lines] == [*map(str, range(1, 200_001)), "no end of line"]


@pytest.mark.root
def test_a_programs_colours_are_shown_and_its_other_control_characters_are_not_obeyed(tmp_path: Path) -> None:
    """It must not write over the lines of others and of the report, nor colour them."""
    script = r"printf '\033[32mstep\033[0m 1\n\033[8mhidden \033]0;owned\007\033[2J\r\033[1Ago on \033[31mred\n'; false"
    done, result = shell(tmp_path, script, "--step-pattern", "^step 1$")
    for node in result.nodes:
        assert len(node.steps_ns) == 1
        assert node.last_words[0] == "step 1"
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(node.name) and "red" in line)
        assert line.endswith("| \\x1b[1Ago on \x1b[31mred\x1b[0m")
    assert "\x1b[32mstep\x1b[0m 1\x1b[0m" in done.stdout
    report = done.stdout[done.stdout.index("last output:") :]
    assert "\x1b" not in report
    assert "\\x1b[1Ago on red" in report


@pytest.mark.root
def test_a_program_that_wants_a_terminal_is_told_why_there_is_none(tmp_path: Path) -> None:
    done, _ = run(tmp_path, REAL, sys.executable, "-c", "input('name? ')")
    assert done.returncode == 1
    assert "have no terminal" in done.stdout


LOSSES = """
import os, socket, time
me, addresses = int(os.environ["TESTBED_NODE"]), os.environ["TESTBED_ADDRESSES"].split(",")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind((addresses[me], 5000))
    sock.settimeout(3)
    if me == 0:
        time.sleep(0.5)
        for number in range(40):
            sock.sendto(str(number).encode(), (addresses[1], 5000))
            time.sleep(0.1)
    else:
        got = set()
        while 39 not in got:
            got.add(int(sock.recv(100)))
        print("lost", *sorted(set(range(40)) - got))
"""


@pytest.mark.clock_kernel
def test_an_outage_takes_a_programs_packets_while_it_lasts_and_the_same_in_two_boots(tmp_path: Path) -> None:
    flags = ("--profile", "link(10Mbit, 10ms)", "--fault", 'at="2s", for="1s", outage=true, link=0, way="up"')
    said = []
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "losses.py").write_text(LOSSES)
        done, _ = run(folder, (*VIRTUAL, *flags), "python", "losses.py")
        assert done.returncode == 0, done.stdout + done.stderr
        said += re.findall(r"lost (.*)", done.stdout)
    assert said[0] == said[1]
    lost = [int(number) for number in said[0].split()]
    assert lost == list(range(lost[0], lost[0] + 10))


@pytest.mark.root
def test_the_job_is_over_when_the_clients_are(tmp_path: Path) -> None:
    (tmp_path / "commands").write_text("0: sleep 1000\n*: echo done\n")
    flags = [*REAL, "--nodes", "3", "--ends-with", "1,2", "--per-node", str(tmp_path / "commands")]
    done = subprocess.run(
        command(tmp_path, flags)[:-1], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all succeeded; node-0 was then terminated" in done.stdout
    assert "<h1>sleep 1000, and 1 other command</h1>" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.root
def test_a_job_that_fails_is_no_baseline(tmp_path: Path) -> None:
    (tmp_path / "baseline.json").write_text("[]")
    done, _ = shell(tmp_path, "exit 3", "--save", str(tmp_path / "baseline.json"))
    assert done.returncode == 3
    assert (tmp_path / "baseline.json").read_text() == "[]"


@pytest.mark.root
def test_a_job_that_sends_nothing_has_a_report_without_a_picture(tmp_path: Path) -> None:
    done, _ = shell(tmp_path, "sleep 1.3")
    assert done.returncode == 0
    assert "<svg" not in (tmp_path / "out" / "report.html").read_text()
    assert not (tmp_path / "out" / "figures").exists()


@pytest.mark.root
@pytest.mark.parametrize("victim", ["testbed exec", "testbed.exec.inside"])
def test_kill_9_leaves_nothing(tmp_path: Path, victim: str) -> None:
    mark = f"5{os.getpid() % 10_000:04d}.25"
    program = subprocess.Popen(
        command(tmp_path, REAL, "sh", "-c", f"(setsid sleep {mark} &) ; sleep {mark}"),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len(running(f"sleep\0{mark}")) >= 4)
    victims = [program.pid] if victim == "testbed exec" else [min(running(str(tmp_path), victim))]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    program.wait(PATIENCE_S)
    wait_until(lambda: not running(mark))


def running(*words: str) -> list[int]:
    """Processes whose command lines have all of these words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if all(word in line for word in words):
                found.append(int(entry.name))
    return found


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "add -- and the command"),
        (["--nodes", "3", "--profile", "cable+lte", "--", "true"], "2 profiles for a star of 3 nodes"),
        (["--topology", "line", "--nodes", "2", "--profile", "cable+lte", "--", "true"], "a line of 2 nodes"),
        (["--step-pattern", "(", "--", "true"], "not a regular expression"),
        (["--codec", "p2p: int9", "--", "true"], "there is no codec 'int9'"),
        (["--codec", "int8", "--", "true"], "'int8' is no rule; write OPERATION: CODEC"),
        (["--codec", "allreduce: int8", "--", "true"], "did you mean 'all_reduce'"),
        (["--pace", "a1000", "--", "true"], "there is no device 'a1000'"),
        (["--save", "/dev/null/base.json", "--", "true"], "name another file"),
        (["--clock", "virtual", "--engine", "relay", "--", "true"], "add --clock real"),
        (["--nodes", "0", "--", "true"], "Invalid value for '--nodes'"),
        (["--fault", 'at="1s", for="1s", outage=true, link=["node-0"]', "--", "true"], "link is ['node-0']"),
        (["--ends-with", "7", "--", "true"], "does not list nodes"),
        (
            ["--topology", "line", "--profile", "cable+lte", "--ends-with", "3", "--", "true"],
            "does not list nodes from 0 to 2",
        ),
        (["--time-limit", "0", "--", "true"], "above 0"),
        (["--time-limit", "nan", "--", "true"], "above 0"),
        (["--host-limit", "inf", "--", "true"], "above 0"),
        (["--env", "NAME", "--", "true"], "NAME=VALUE"),
        (["--fault", 'at="1s', "--", "true"], "Unterminated string"),
        (["--fault", 'at="1s", outage=true', "--", "true"], "lacks 'for'"),
        (["--fault", 'node=1, at="1s", kill=true', "--", "true"], "exec has faults of links only"),
        (["--fault", 'at="1s", for="1s", rate="1Gbit"', "--", "true"], "no worse than node-0 up"),
        (["--check", "nowhere.json", "--", "true"], "make one with --save"),
        (["--per-node", "nowhere", "--", "true"], "one of them"),
    ],
)
def test_mistakes_end_with_status_2_and_start_nothing(tmp_path: Path, words: list[str], problem: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "testbed", "exec", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert problem in re.sub(r"\s+", " ", done.stderr)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_a_killed_command_is_used_again_without_what_that_left(tmp_path: Path) -> None:
    """Observers append to their files, and exec.json is there before the certificates and the report are."""
    left = [tmp_path / "exec.json", tmp_path / "torch" / "rank-0.jsonl"]
    (tmp_path / "torch").mkdir()
    for path in left:
        path.write_text("{}\n")
    assert execute._folder(tmp_path) == tmp_path
    assert not any(path.exists() for path in left)
    (tmp_path / "report.html").touch()  # written last
    with pytest.raises(UserError, match="has the result of another run"):
        execute._folder(tmp_path)


def test_a_command_with_an_open_quote_is_refused(tmp_path: Path) -> None:
    (tmp_path / "commands").write_text("*: sh -c 'true")
    words = [sys.executable, "-m", "testbed", "exec", "--per-node", "commands"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot split the command of node 0" in done.stderr


@pytest.mark.clock_kernel
@pytest.mark.slow
def test_on_the_virtual_clock_files_that_are_lost_are_named(tmp_path: Path) -> None:
    done, result = run(tmp_path, VIRTUAL, "sh", "-c", "echo kept > kept-{node}; echo lost > /srv/lost-{node}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result is not None
    assert (tmp_path / "kept-1").read_text() == "kept\n"
    assert result.lost_files == ("/srv/lost-0", "/srv/lost-1")
    assert "files were written outside the shared folders and are lost" in done.stdout
    assert not Path("/srv/lost-0").exists()


@pytest.mark.clock_kernel
@pytest.mark.slow
def test_on_the_virtual_clock_programs_find_no_temporary_files_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is there already makes mkdir fail, and a system call that fails takes time."""
    (tmp_path / "temporary" / "left").mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    script = "import os, tempfile; print('found', os.listdir(tempfile.gettempdir()))"
    done, _ = run(tmp_path, VIRTUAL, sys.executable, "-c", script)
    assert done.stdout.count("found []") == 2, done.stdout + done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(REAL, marks=pytest.mark.root),
        pytest.param(VIRTUAL, marks=[pytest.mark.clock_kernel, pytest.mark.slow]),
    ],
    ids=["real", "virtual"],
)
def test_others_send_while_a_program_runs_and_the_report_says_how_much(tmp_path: Path, flags: Sequence[str]) -> None:
    links = ("--profile", "cable, background=call down", "--nodes", "2")
    done, result = run(tmp_path, (*flags, *links), "sleep", "3")
    assert result is not None, done.stderr
    assert [(each.link, each.flow) for each in result.lab.background or ()] == [
        (f"node-{node}", "call 2.6Mbit down") for node in (0, 1)
    ]
    for each in result.lab.background or ():
        assert each.goodput_bps == pytest.approx(2_600_000, rel=0.05)
        assert f"background on {each.words}" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.clock_kernel
@pytest.mark.slow
def test_torchrun_takes_the_same_nanoseconds_in_every_boot(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    times = []
    for boot in ("one", "two"):
        flags = (*VIRTUAL[:2], "--memory", "4G", "--step-pattern", "^step", "-o", str(tmp_path / boot))
        words = [sys.executable, "-m", "testbed", "exec", *flags, "--", "torchrun", "ddp.py"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        times.append(re.findall(r"step \d (\d+)", done.stdout))
        told = json.loads((tmp_path / boot / RESULT).read_text())
        assert [len(node["steps_ns"]) for node in told["nodes"]] == [4, 4]
    assert times[0] == times[1]
    assert len(times[0]) == 8


@pytest.mark.clock_kernel
@pytest.mark.slow
def test_a_codec_shortens_the_steps_of_an_unmodified_job_and_a_baseline_tells(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    baseline, results = tmp_path / "baseline.json", []
    for name, flags in (("plain", ["--observe", "--save"]), ("coded", ["--codec", "all_reduce: int8", "--check"])):
        flags = [*VIRTUAL[:2], *flags, str(baseline), "-o", str(tmp_path / name)]
        words = [sys.executable, "-m", "testbed", "exec", *flags, "--", "torchrun", "ddp.py"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == (name == "coded"), done.stdout + done.stderr
        results.append(ExecResult.model_validate_json((tmp_path / name / RESULT).read_text()))
    assert "numbers differ from" in done.stdout
    plain, coded = results
    assert [len(node.steps_ns) for node in plain.nodes] == [4, 4]  # the optimiser's, for nothing marks them
    reduced = next(each for each in plain.operations if each.what == "all_reduce")
    assert reduced.payload_bytes == 2 * 4 * 4 * (64 * 32 + 32)  # two ranks, four steps, fp32
    assert "all_reduce" in (tmp_path / "plain" / "report.html").read_text()
    job = read_observations(tmp_path / "plain" / "torch")
    write_observed(timeline(job), tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    check_events(events)
    check_nesting(events)
    assert pairs(events, "b", "e") == sum(each.operations for each in plain.operations) + sum(
        len(list(rank.of("wait"))) for rank in job
    )
    assert sum(talk.payload_bytes for talk in coded.talks) < sum(talk.payload_bytes for talk in plain.talks)


@pytest.mark.root
def test_programs_beside_the_interpreter_are_found_whatever_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a user types .venv/bin/testbed exec -- torchrun."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    done, result = run(tmp_path, REAL, "torchrun", "--help")
    assert result is not None, done.stdout + done.stderr
    assert done.returncode == 0
    assert "--nproc-per-node" in done.stdout


@pytest.mark.root
@pytest.mark.clock_kernel
@pytest.mark.slow
def test_modules_take_on_the_virtual_clock_what_was_recorded_on_the_real_one(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    recording, steps = tmp_path / "recorded" / "torch", []
    for name, flags in (
        ("recorded", (*REAL, "--observe")),
        ("unpaced", (*VIRTUAL[:2], "--observe")),
        ("paced", (*VIRTUAL[:2], "--pace", str(recording))),
    ):
        words = [
            sys.executable,
            "-m",
            "testbed",
            "exec",
            *flags,
            "-o",
            str(tmp_path / name),
            "--",
            "torchrun",
            "ddp.py",
        ]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        nodes = ExecResult.model_validate_json((tmp_path / name / RESULT).read_text()).nodes
        steps.append([after - before for before, after in itertools.pairwise(nodes[0].steps_ns)])
    told = [json.loads(line) for line in (recording / "rank-0.jsonl").read_text().splitlines()]
    took_ns = sum(line["ns"] for line in told if line["kind"] == "module")
    assert took_ns > 0
    assert all(paced > unpaced for unpaced, paced in zip(*steps[1:], strict=True))


@pytest.mark.root
def test_on_the_real_clock_it_waits_for_whoever_measures(tmp_path: Path) -> None:
    with hold_machine():
        started = subprocess.Popen(command(tmp_path, REAL, "true"), stdout=subprocess.PIPE, text=True)
        assert started.stdout is not None
        assert any("waiting for it" in line for line in started.stdout)
        assert started.poll() is None
    assert started.communicate(timeout=PATIENCE_S) is not None
    assert started.returncode == 0
