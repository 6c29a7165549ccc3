"""How often is the first choice of `advise` the fastest, and what does it lose when it is not?

    python -m tests.predict.held_out_advice --results /root/held-out

Draws SET_UPS set-ups by a rule that knows no result, plays the first choice of each and its RIVALS best rivals on the
virtual clock, and writes docs/advice.csv and the table of docs/advice.md. A rival has another number of stages,
replicas or local steps than the first choice and the other rival. A set-up is a model, a device,
a profile, a number of nodes and a batch, each drawn uniformly from everything that is shipped or listed below. A draw
that `advise` refuses, or for which a single layout fits, is skipped, because nothing can be compared.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from testbed.commands.console import need_clock_kernel
from testbed.devices.device import device_files
from testbed.errors import LabError, SpecError
from testbed.predict import cells
from testbed.predict.advice import Layout, Question, advise, experiment, look_up
from testbed.predict.shapes import PUBLISHED
from testbed.profiles.loading import profile_files
from testbed.report.claims import proven_codecs
from testbed.report.numbers import markdown_table, three

SET_UPS, SEED, RIVALS = 20, 0, 2
NODES, BATCHES, TOKENS, PACKETS = (2, 4, 8), (32, 128), 512, 5_000
DOCS = Path(__file__).parents[2] / "docs"
FILE, PAGE, MARK = DOCS / "advice.csv", DOCS / "advice.md", "<!-- held-out -->\n"


class Row(NamedTuple):
    """A played layout."""

    set_up: int
    model: str
    device: str
    profile: str
    nodes: int
    batch: int
    layout: str
    predicted_s: float
    """Seconds per batch."""
    played_s: float
    """NaN: not played."""


def drawn(codecs: Sequence[str]) -> Iterator[tuple[Question, list[Layout]]]:
    """Yield each drawn set-up, with its first choice and the rivals."""
    draw, found = random.Random(SEED), 0
    while found < SET_UPS:
        model, device, profile = (draw.choice(sorted(names)) for names in (PUBLISHED, device_files(), profile_files()))
        nodes, batch = draw.choice(NODES), draw.choice(BATCHES)
        try:
            setting = look_up(model, device, nodes, profile, batch, TOKENS)
            first, *others = advise(setting, codecs)[0]
        except SpecError:
            continue
        best = {one[:4]: one for one in reversed(others) if one[:4] != first[:4]}
        if best:
            found += 1
            yield setting, [first, *sorted(best.values(), key=lambda one: one.batch_s)[:RIVALS]]


def named(one: Layout) -> str:
    """Return the words for a layout in the table."""
    _, replicas, stages, steps, whole, job, *_ = one
    many = f"{replicas} workers" if stages == 1 else f"{replicas} pipelines of {stages}" if replicas > 1 else ""
    many = (many or f"pipeline of {stages}") + f", {steps} local steps" * (steps > 1)
    return many if stages == 1 else f"{many}, {job['in_flight']} of {whole} in flight"


def play(results: Path, *, only_read: bool) -> list[Row]:
    """Play all set-ups, but for cells in `results`. Return the rows of those whose first choice was played."""
    planned, told = list[cells.Planned](), list[tuple[int, Question, Layout]]()
    results.mkdir(parents=True, exist_ok=True)
    for number, (setting, best) in enumerate(drawn(proven_codecs()), 1):
        file = results / f"set-up-{number}.toml"
        file.write_text(experiment(setting, best, PACKETS), encoding="utf8")
        planned += cells.plan_cells(str(file))
        told += [(number, setting, one) for one in best]
    if not only_read:
        try:
            cells.play_missing(planned, results, need_clock_kernel(), say=lambda text: print(text, flush=True))
        except LabError as error:
            print(error, flush=True)
    rows = list[Row]()
    for (number, setting, one), each in zip(told, planned, strict=True):
        result = cells.result_of(each.cell, results)
        played_s = math.nan if result is None or result.step_ns is None else result.step_ns / 1e9 / one.local_steps
        asked = (setting.model, setting.device.name, setting.profile, setting.nodes, setting.batch)
        rows.append(Row(number, *asked, named(one), one.batch_s, played_s))
    first = {row.set_up: row.played_s for row in reversed(rows)}
    return [row for row in rows if not math.isnan(first[row.set_up])]


def read_rows() -> list[Row]:
    """Return the rows of docs/advice.csv."""
    with FILE.open(encoding="utf8", newline="") as file:
        return [
            Row(int(r["set_up"]), r["model"], r["device"], r["profile"], int(r["nodes"]), int(r["batch"]), r["layout"],
                float(r["predicted_s"]), float(r["played_s"]))
            for r in csv.DictReader(file)
        ]  # fmt: skip


def losses(rows: Iterable[Row]) -> list[tuple[Row, Row, float, int]]:
    """Return for each set-up of which several layouts were played the first choice, the fastest layout, the share of
    time that the choice loses, and the number of layouts played.
    """
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if not math.isnan(row.played_s):
            groups.setdefault(row.set_up, []).append(row)
    found = []
    for group in (group for group in groups.values() if len(group) > 1):
        fastest = min(group, key=lambda row: row.played_s)
        found.append((group[0], fastest, group[0].played_s / fastest.played_s - 1, len(group)))
    return found


def draw_table(rows: Sequence[Row]) -> str:
    """Return the summary and the table in Markdown."""
    every = losses(rows)
    lost = [share for _, _, share, _ in every]
    apart = [abs(row.predicted_s / row.played_s - 1) for row in rows if not math.isnan(row.played_s)]
    first_s = {row.set_up: row.predicted_s for row in reversed(rows)}
    slower = sorted(row.predicted_s / first_s[row.set_up] for row in rows if math.isnan(row.played_s))
    lines = [
        [
            f"{first.model}, {first.nodes} {first.device}, {first.profile}, {first.batch}", first.layout,
            three(first.predicted_s), three(first.played_s), str(count),
            "it" if not share else f"{fastest.layout}: {three(fastest.played_s)}", f"{share:.1%}".replace("%", " %"),
        ]
        for first, fastest, share, count in every
    ]  # fmt: skip
    head = ("set-up", "first choice", "predicted s", "played s", "layouts played", "fastest", "lost")
    return (
        f"{len(every)} of {SET_UPS} set-ups were compared. The first choice is the fastest of the layouts played in "
        f"{sum(share == 0 for share in lost)} of them. It loses {median(lost):.1%} in the median and {max(lost):.1%} "
        f"at worst. Predicted and played times differ by {median(apart):.1%} in the median and {max(apart):.1%} at "
        f"most, over {len(apart)} layouts.{_gave_up(slower)}\n\n"
    ).replace("%", " %") + markdown_table(head, lines, right=head[2:5])


def _gave_up(slower: Sequence[float]) -> str:
    """Return what to say of layouts that were not played; `slower`: their predictions over the first choice's."""
    if not slower:
        return ""
    return (
        f" In {len(slower)} others, predicted to take {slower[0]:.2g} to {slower[-1]:.2g} times as long as the first "
        "choice, a connection timed out: buffers that hold all that waits keep packets longer than TCP repeats them."
    )


def main() -> None:
    """Play, and write the file and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of the played cells, which are kept")
    parser.add_argument("--only-read", action="store_true", help="play nothing: write what has been played so far")
    asked = parser.parse_args()
    rows = play(asked.results, only_read=asked.only_read)
    with FILE.open("w", encoding="utf8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows)
    above, _, below = PAGE.read_text(encoding="utf8").split(MARK)
    PAGE.write_text(MARK.join([above, draw_table(rows), below]), encoding="utf8")
    sys.stdout.write(draw_table(rows) + "\n")


if __name__ == "__main__":
    main()
