"""Write live.csv: tokens per second of cells that were played, and run live over sockets.

python -m testbed sweep experiments/decode/live.toml --clock virtual --results results/live
python experiments/decode/live.py [--results results/live/decode] [--output experiments/decode]
"""

import pandas as pd
from figures import timed

from testbed import results
from testbed.report import publishing

if __name__ == "__main__":
    found, output = publishing.folders("live/decode", __doc__)
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for run in results.runs(found):
        _, _, last, tokens_per_s = timed(run)
        of_cell = rows.setdefault((run.cell.codec, run.cell.network), {})
        of_cell[f"{run.cell.timing}_tokens_per_s"] = tokens_per_s
        of_cell[f"{run.cell.timing}_loss"] = last[0].loss or 0.0
    frame = pd.DataFrame.from_dict(rows, orient="index").rename_axis(index=["codec", "link"])
    frame["off"] = frame.live_tokens_per_s / frame.played_tokens_per_s - 1
    frame.sort_index().to_csv(output / "live.csv")
