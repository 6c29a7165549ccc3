"""Results to pictures: the table in the terminal, the figures, and one page that shows all of it. Reads results, starts nothing.

collect   which runs stand side by side         entry        the runs of one codec over one network, together
tables    their numbers as text                 comparison   against fp32 and bf16, with intervals
lines     loss figures                          bars         time, byte and efficiency figures
gantt     one step, stage by stage              utilisation  what links carried over time
asked     links asked for against measured      settings     what stands below every figure
findings  sentences computed from numbers       page         the HTML page
"""

from testbed.report.certificates import certificate_table
from testbed.report.collect import latest
from testbed.report.page import draw_gantt, write_report
from testbed.report.tables import terminal_table

__all__ = ["certificate_table", "draw_gantt", "latest", "terminal_table", "write_report"]
