"""What a cluster is sent and sends back, the versions it must have and its flags: without a cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed import paths
from testbed.commands.cluster import check_cluster_flags, cluster_words, refuse_others
from testbed.errors import ResultsError, SpecError, UserError
from testbed.player.play_job import PlayJob
from testbed.spec import ImagesSpec
from testbed.sweep import on_node, play_task
from testbed.sweep.executor import Task
from testbed.sweep.live_session import Tokens
from testbed.sweep.ray_cluster import RayCluster
from testbed.sweep.trainings import files_of
from tests.specs import text_spec


def shipped(folder: Path, **changes: Any) -> on_node.Shipment:
    """A task as the driver sends it; the driver's folder is then gone."""
    data, cache = folder / "cache" / "tokens" / "a.npy", folder / "cache"
    data.parent.mkdir(parents=True)
    data.write_bytes(b"tokens")
    job = folder / "job.json"
    stated = {"tokens": str(data), "folder": str(folder / "made" / "one"), "recipe": {"text": str(data)}}
    job.write_text(json.dumps(stated | changes))
    task = Task(
        name="one",
        module="tests.sweep.shipped_program",
        arguments=(str(job),),
        memory_bytes=1,
        attempt="copy",
        reads=(job, data),
        writes=folder / "made" / "one",
        guest=True,
    )
    files = [on_node.SentFile(str(path), paths.digest(path), path.read_bytes()) for path in task.reads]
    shutil.rmtree(folder)
    return on_node.Shipment(task, files, str(cache), on_node.facts().versions)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the node."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node"))
    return tmp_path / "node" / "testbed"


def test_a_task_needs_nothing_of_the_machine_that_sent_it(tmp_path: Path, cache: Path) -> None:
    home = tmp_path / "driver"
    home.mkdir()
    shipment = shipped(home)
    done = on_node.work(shipment)
    assert (done.unlike, done.error, done.said) == ("", None, "done\n")
    sender = str(home / "cache" / "tokens" / "a.npy")
    assert done.files == {"deep/copy": b"tokens", "stated": sender.encode()}, "a recipe's own texts stay"
    assert (cache / "tokens" / "a.npy").read_bytes() == b"tokens"

    def never(content: Any) -> bytes:
        raise AssertionError

    only_job = shipment.files[0]._replace(content=b"never")
    again = shipment._replace(files=[shipment.files[0], shipment.files[1]._replace(content=None)])
    assert only_job.path == again.files[0].path
    assert on_node.work(again, lambda content: content or never(content)).files == done.files, "data is sent once"
    (cache / "tokens" / "a.npy").write_bytes(b"other!")
    assert on_node.work(shipment).files == done.files, "what is there under that name is compared"

    place = tmp_path / "results" / "one"
    place.parent.mkdir()
    on_node.place_results(place, done.files)
    assert (place / "deep" / "copy").read_bytes() == b"tokens"
    assert [path.name for path in place.parent.iterdir()] == ["one"]


def test_an_error_keeps_its_text_and_kind(tmp_path: Path, cache: Path) -> None:
    (home := tmp_path / "driver").mkdir()
    done = on_node.work(shipped(home, refuse=True))
    assert isinstance(done.error, SpecError)
    assert str(done.error) == "cannot copy: line one: this cannot be"
    assert done.files == {}


def test_other_versions_run_nothing(tmp_path: Path, cache: Path) -> None:
    (home := tmp_path / "driver").mkdir()
    shipment = shipped(home)
    needed = {**shipment.versions, "torch": "9.9"}
    done = on_node.work(shipment._replace(versions=needed))
    assert done.unlike == f"it has torch {shipment.versions['torch']}, and 9.9 is needed"
    assert not (cache / "tokens").exists(), "its data is placed nowhere"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", ""])
def test_a_file_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ResultsError, match="outside the task's folder"):
        on_node.place_results(tmp_path / "one", {"good": b"", name: b""})
    assert not list(tmp_path.iterdir())


def test_only_prepared_files_are_sent(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens.npy", 10)
    assert files_of(text_spec(), tokens) == (tokens.path,)
    digits = ImagesSpec.model_construct(images="digits")
    assert files_of(digits, Tokens(tmp_path, 10)) == ()
    hub = ImagesSpec.model_construct(images="hub:some/set")
    assert [path.parent for path in files_of(hub, Tokens(tmp_path, 10))] == [tmp_path / "images"] * 3


# ------------------------------------------------------------------ which machine is measured
def a_cluster(*cpus: str) -> RayCluster:
    cluster = RayCluster.__new__(RayCluster)
    facts = {
        f"{number}": on_node.NodeFacts(
            "host", {}, {"cpu_model": cpu, "cores": 2, "kernel": "6", "versions": {"torch": "2"}}
        )
        for number, cpu in enumerate(cpus)
    }
    cluster._facts, cluster._head = facts, "head:1"
    cluster._nodes = lambda: {name: {} for name in facts}  # type: ignore[method-assign]
    return cluster


def test_prepared_data_is_put_once_and_again_after_a_loss(tmp_path: Path, cache: Path) -> None:
    data, trace = cache / "tokens" / "a.npy", tmp_path / "one.trace"
    data.parent.mkdir(parents=True)
    for path in (data, trace):
        path.write_bytes(path.name.encode())
    stored: list[bytes] = []

    def lost(ref: object) -> None:
        raise OSError("node died")

    cluster = RayCluster.__new__(RayCluster)
    cluster._kept = {}
    cluster._ray = SimpleNamespace(
        put=lambda content: stored.append(content) or len(stored),
        get=lost,
        exceptions=SimpleNamespace(RayError=OSError),
    )
    first, second = [cluster._put(path) for path in (data, trace)], [cluster._put(path) for path in (data, trace)]
    assert stored == [b"a.npy", b"one.trace", b"one.trace"], "a trace goes with its task"
    assert first[0] == second[0] == on_node.SentFile(str(data), paths.digest(data), 1)
    data.write_bytes(b"other")
    assert cluster._put(data).content == len(stored) == 4, "the content decides, and not the name"
    result = cluster._result(Task("t", "m", (), 1, "train"), None)
    assert result is not None
    assert "cannot train: its node or process was lost" in str(result.error)
    assert cluster._put(data).content == len(stored) == 5, "what is lost is put again"


def test_durations_are_those_of_one_kind_of_machine() -> None:
    notes: list[str] = []
    assert a_cluster("b", "a", "b").machine({}, notes.append)["cpu_model"] == "b", "the most"
    assert "2 of 3 nodes: b, 2 cores" in notes[0]
    for cpus in (("b", "a"), ("a", "b")):
        assert a_cluster(*cpus).machine({}, notes.append)["cpu_model"] == "a", "a tie"
    cluster = a_cluster("b", "a", "b")
    before = cluster._facts["1"].machine
    assert cluster.machine(before, notes.append)["cpu_model"] == "a", "as before"
    assert cluster._alike() == ["1"]


# ------------------------------------------------------------------ guests
def test_guests_have_about_as_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [100.0, 1, 1, 30, 30, 1, 1]
    monkeypatch.setattr(play_task, "predicted_seconds", lambda job: job)
    jobs: list[PlayJob] = seconds  # type: ignore[assignment]
    groups = play_task._groups(jobs, 2)
    assert sorted(number for group in groups for number in group) == list(range(7))
    assert groups[0] == [0], "the longest first, alone"
    assert len(play_task._groups([1.0] * 10, 100)) == 1, "a boot for each second would be too much"  # type: ignore[list-item]


# ------------------------------------------------------------------ flags
def test_flags_of_a_cluster_need_the_executor(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--address and --runtime-env is for --executor ray"):
        check_cluster_flags("local", "auto", "{}")
    with pytest.raises(UserError, match="--address"):
        cluster_words("local", "auto", None)
    assert cluster_words("local", None, None) == []
    assert cluster_words("ray", "h:1", "{}") == ["--executor", "ray", "--address", "h:1", "--runtime-env", "{}"]
    with pytest.raises(UserError, match="slurm"):
        check_cluster_flags("slurm", None, None)


@pytest.mark.parametrize(
    ("text", "words"), [("[1]", "must be a JSON object"), ("{", "is not JSON"), ("no/such.json", "neither JSON nor")]
)
def test_a_runtime_environment_is_an_object(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_cluster_flags("ray", None, text)


def test_a_runtime_environment_may_be_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "env.json").write_text('{"working_dir": "."}')
    assert check_cluster_flags("ray", None, str(file)) == {"working_dir": "."}


def test_what_a_cluster_cannot_do_is_refused_first() -> None:
    with pytest.raises(UserError, match="2 cells are live, such as one"):
        refuse_others(["one", "two"], "virtual")
    with pytest.raises(UserError, match="virtual clock alone"):
        refuse_others([], "real")
    refuse_others([], "virtual")
