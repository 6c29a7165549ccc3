"""Results to pictures: the table in the terminal, the figures, and one page that shows all of it. Reads results, starts nothing.

collect   which runs stand side by side       tables   their numbers as text
lines     loss figures                        bars     time and byte figures
utilisation  what links carried over time     findings  sentences computed from numbers
page      the HTML page
"""

from testbed.report.collect import latest
from testbed.report.page import build
from testbed.report.tables import certificate_table, terminal_table

__all__ = ["build", "certificate_table", "latest", "terminal_table"]
