"""testbed/export/README.md, drawn from the tables' columns."""

from __future__ import annotations

from testbed.export.columns import PANDAS, TABLES

_HEAD = """# Results for other programs

Printed by `python -m testbed export --page`.

```
python -m testbed export results/default --to csv          # or parquet: six tables, and columns.csv, which describes them
python -m testbed export results/default --to tensorboard  # pip install 'testbed[tensorboard]'; tensorboard --logdir ...
python -m testbed export results/default --to perfetto     # a timeline a run, for https://ui.perfetto.dev
```

Files go to `results/default/export/FORMAT`, or where `-o` says. All runs of the last sweep's cells are there, those that failed
too: look at `status`.

In Python:

```python
import testbed

steps = testbed.run_cell(codec="int8", profile="cable", fields={"training.steps": 20})
steps[steps.phase == "train"].plot(x="end_s", y="loss")
steps.attrs["summary"]["efficiency"]

runs = testbed.load("results/default")
runs.pivot_table(index="network", columns="codec", values="step_s", aggfunc="median")
testbed.steps("results/default").groupby(["cell_id", "phase"]).step_s.median()
```

A CSV file reads back with its types:

```python
import pandas

columns = pandas.read_csv("export/csv/columns.csv").set_index(["table", "column"]).type
pandas.read_csv("export/csv/steps.csv", dtype=columns["steps"].to_dict())
```

Times are seconds of the emulated world, as in the report: where the lab was dilated, what was found there is divided by
`compute.dilation`. Certificates are of the links as the lab had them. What is not known is missing, never 0.

A timeline has a track a stage, with its actions and waits; a track a directed boundary, with the frames under way, tied by arrows
to the actions that sent and used them; and a counter a link and direction, with the rate that it carried.
"""


def page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for name, columns in TABLES.items():
        rows = "".join(
            f"| `{one.name}` | {PANDAS[one.kind]} | {one.what.replace('|', chr(92) + '|')} |\n" for one in columns
        )
        parts.append(f"## {name}\n\n| column | type | what it is |\n| --- | --- | --- |\n{rows}")
    return "\n".join(parts)
