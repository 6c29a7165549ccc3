"""Write live.csv: tokens per second of cells that were played, and run live over sockets.

python -m testbed sweep experiments/decode/live.toml --clock virtual --results results/live
python experiments/decode/live.py [--results results/live/decode] [--output experiments/decode]
"""

from __future__ import annotations

from statistics import fmean

import pandas as pd

from testbed import results
from testbed.jobs.decode import Decoding
from testbed.report import experiments

if __name__ == "__main__":
    found, output = experiments.folders("live/decode", __doc__)
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for run in results.runs(found):
        job = run.cell.job
        assert isinstance(job, Decoding)
        first, last = ([each for each in run.steps(place) if not each.warmup] for place in (0, job.stages - 1))
        seconds = fmean((step.end_ns - step.start_ns) / 1e9 for step in first)
        of_cell = rows.setdefault((run.cell.codec, run.cell.network), {})
        of_cell[f"{run.cell.timing}_tokens_per_s"] = last[0].tokens / seconds
        of_cell[f"{run.cell.timing}_loss"] = last[0].loss or 0.0
    frame = pd.DataFrame.from_dict(rows, orient="index").rename_axis(index=["codec", "link"])
    frame["off"] = frame.live_tokens_per_s / frame.played_tokens_per_s - 1
    frame.sort_index().to_csv(output / "live.csv")
