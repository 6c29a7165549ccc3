"""A result folder of many runs that never happened, and what the commands cost on it.

python -m tests.many_runs make COUNT FOLDER     writes FOLDER/sweep.toml and FOLDER/results/many, of COUNT runs
python -m tests.many_runs measure FOLDER [-k COMMAND]
                                                prints processor seconds and the largest memory of each command
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from testbed import manifest, results
from testbed.sweep import conduct
from testbed.sweep.plan import Choice, load_experiment
from tests.synthetic import Pipeline, record_sweep, write_run

NAME = "many"
_SMALL = {"codec": ["fp32", "bf16", "int8", "delta-int8"], "profile": ["consumer-80mbps", "cable"]}
EXPERIMENT = """
question = "What do many runs cost?"
engine = "auto"
live_checks = 0
[cell]
topology = "star"
timing = "played"
codec_cost = "zero"
compute = {mode = "paced", forward = "2ms", backward = "4ms", update = "1ms"}
[cell.workload]
model = "gpt2-nano"
text = "bundled"
sequence_length = 32
batch_size = 8
validation_batches = 1
[cell.pipeline]
stages = 3
microbatches = 4
schedule = "1f1b"
in_flight = 4
[cell.optimiser]
learning_rate = 1e-3
weight_decay = 0.01
beta1 = 0.9
beta2 = 0.999
clip_norm = 1.0
[cell.training]
steps = 8
warmup_steps = 1
evaluate_every = 4
[axes]
"""


def make(count: int, folder: Path) -> None:
    """Write the runs: one is made, and the others differ from it in their cells."""
    home = results.make_folder(folder / NAME)
    seeds = list(range(-(-count // (len(_SMALL["codec"]) * len(_SMALL["profile"])))))
    axes = "".join(f"{name} = {values!r}\n" for name, values in [*_SMALL.items(), ('"training.seed"', seeds)])
    (home / "sweep.toml").write_text(EXPERIMENT + axes.replace("'", '"').replace('""', '"'), encoding="utf8")
    kept = results.make_folder(folder / "results" / NAME)
    agenda = conduct.make_agenda(
        load_experiment(str(home / "sweep.toml")), "netem", Choice(False), kept, clock="virtual"
    )
    cells = agenda.cells[:count]
    pipeline = Pipeline(cells[0].profiles[0], payload_bytes=8_000, raw_bytes=16_000)
    first = write_run(kept, cells[0], pipeline)
    alike = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    summary = first.summary
    assert summary is not None
    proved = manifest.Manifest.model_validate_json(alike[manifest.NAME])
    for cell in cells[1:]:
        own = kept / cell.id / "run-1"
        own.mkdir(parents=True)
        told = summary.model_copy(update={"cell_id": cell.id})
        changed = {
            "cell.json": cell.model_dump_json(indent=1).encode() + b"\n",
            "summary.json": told.model_dump_json(indent=1).encode() + b"\n",
        }
        files = dict(proved.files)
        for name, content in changed.items():
            digest = hashlib.sha256(content).hexdigest()
            files[name] = manifest.FileEntry(bytes=len(content), sha256=digest)
        unsealed = proved.model_copy(update={"subject": manifest.subject_of(cell), "files": files, "seal": ""})
        sealed = unsealed.model_copy(update={"seal": manifest.subject_of(unsealed)})
        changed[manifest.NAME] = sealed.model_dump_json(indent=1).encode() + b"\n"
        for name, content in {**alike, **changed}.items():
            (own / name).write_bytes(content)
    record_sweep(kept, cells)


def commands(folder: Path) -> dict[str, list[str]]:
    home, kept = str(folder / NAME / "sweep.toml"), folder / "results"
    testbed = [sys.executable, "-P", "-m", "testbed"]
    library = [sys.executable, "-c"]
    listing = "import sys; from pathlib import Path; from testbed import results; " + (
        "print(sum(results.finished(Path(sys.argv[1]), p.name) is not None for p in Path(sys.argv[1]).glob('*/')))"
    )
    index = "import sys; from pathlib import Path; from testbed.report.index import write_index; " + (
        "print(write_index(Path(sys.argv[1])))"
    )
    return {
        "plan": [*testbed, "plan", home, "--results", str(kept)],
        "listing": [*library, listing, str(kept / NAME)],
        "index": [*library, index, str(kept)],
        "resume": [*testbed, "sweep", home, "--results", str(kept), "--no-report"],
        "export": [*testbed, "export", str(kept / NAME)],
    }


def measure(folder: Path, only: str) -> None:
    for name, command in commands(folder).items():
        if only not in name:
            continue
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1]) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = used.ru_utime + used.ru_stime
        print(f"{name}: {seconds:.1f} processor s, {used.ru_maxrss / 1024:.0f} MiB, status {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "measure"))
    parser.add_argument("count", nargs="?", type=int, default=0)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", default="", metavar="COMMAND", help="measure only this")
    asked = parser.parse_args()
    if asked.what == "make":
        make(asked.count, asked.folder.resolve())
    else:
        measure(asked.folder.resolve(), asked.k)


if __name__ == "__main__":
    main()
