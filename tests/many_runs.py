"""A result folder of many runs that never happened, and what the commands cost on it.

Files that are the same in all runs are hard links: processors are measured, and the disk is not.

python -m tests.many_runs make COUNT FOLDER     writes FOLDER/many/sweep.toml and FOLDER/results/many, of COUNT runs;
                                                a smaller folder is extended
python -m tests.many_runs measure FOLDER [-k COMMAND]
                                                prints processor seconds and the largest memory of each command
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from testbed import manifest, results
from testbed.frozen import canonical_json
from testbed.sweep import conduct
from testbed.sweep.plan import Choice, load_experiment
from tests.synthetic import Pipeline, write_run

NAME = "many"
_MOST_LINKS = 50_000
"""Of one file; file systems have a limit."""
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
    """Write the runs: one is made, and the others differ from it in their cells. Texts are changed, and not records."""
    home = results.make_folder(folder / NAME)
    seeds = range(-(-count // (len(_SMALL["codec"]) * len(_SMALL["profile"]))))
    axes = "".join(f"{name} = {values!r}\n" for name, values in [*_SMALL.items(), ('"training.seed"', list(seeds))])
    (home / "sweep.toml").write_text(EXPERIMENT + axes.replace("'", '"').replace('""', '"'), encoding="utf8")
    kept = results.make_folder(folder / "results" / NAME)
    choice = Choice(overrides=["training.seed=0"])
    alike = conduct.make_agenda(load_experiment(str(home / "sweep.toml")), "netem", choice, kept, clock="virtual").cells
    first = write_run(kept, alike[0], Pipeline(alike[0].profiles[0], payload_bytes=8_000, raw_bytes=16_000))
    files = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    proved = json.loads(files.pop(manifest.NAME))
    ids = []
    for number, (seed, of) in enumerate(itertools.islice(itertools.product(seeds, alike), count)):
        canonical, stated = (
            _with_seed(text, seed) for text in (canonical_json(of), of.model_dump_json(indent=1) + "\n")
        )
        ids.append(f"{of.id.rpartition('-')[0]}-{hashlib.blake2b(canonical.encode(), digest_size=5).hexdigest()}")
        own = kept / ids[-1] / "run-1"
        if number % _MOST_LINKS == 0:
            linked = own
        if number and own.exists():  # of a smaller folder
            continue
        own.mkdir(parents=True, exist_ok=True)
        summary = files["summary.json"].replace(alike[0].id.encode(), ids[-1].encode())
        changed = {"cell.json": stated.encode(), "summary.json": summary}
        for name, content in changed.items():
            proved["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        proved |= {"subject": hashlib.sha256(canonical.encode()).hexdigest(), "seal": ""}
        proved["seal"] = hashlib.sha256(json.dumps(proved, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        changed[manifest.NAME] = (json.dumps(proved, indent=1) + "\n").encode()
        for name, content in {**files, **changed}.items():
            if name in changed or linked == own:
                (own / name).write_bytes(content)
            else:
                os.link(f"{linked}/{name}", f"{own}/{name}")
    results.write_json(kept / "sweep.json", results.SweepRecord(question="", command="", cells=tuple(ids)))


def _with_seed(text: str, seed: int) -> str:
    """Return a cell's text with another seed than 0."""
    changed, count = re.subn(r'("seed": ?)0', rf"\g<1>{seed}", text)
    assert count == 1
    return changed


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
