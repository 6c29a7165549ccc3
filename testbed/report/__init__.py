"""Reports: what do the runs of a sweep show, as a table, figures and one HTML page? Reads results, starts nothing.

collect        which runs stand side by side
entry          the runs of one codec over one network, and their numbers together
comparison     each codec compared with fp32 and bf16, with intervals
tables         the table of results, one row of COLUMNS for each number
conclusions    sentences computed from the numbers
findings       titles of figures, computed from the numbers
settings       what the runs were made with, for the foot of every figure
live           how far played and live steps are apart here
remarks        what must be known about a codec wherever its name stands
numbers        numbers as text

style          colours, markers and dashes of codecs
canvas         the frame of every figure, and figures as PNG and SVG
labels         labels beside marks
bars           time, byte and efficiency figures
lines          loss figures
gantt          one step, stage by stage
trace_chart    the steps of a trace, lane by lane
utilisation    what the links carried over time
certificates   links asked for against links measured, as tables and a figure
page           the HTML page with all figures
cell_page      a page for each cell
step_svg       one step as a small SVG, for a cell's page
index          a page that lists every sweep of a folder of results
against        a page that shows two result folders side by side
templates      how pages are written; html/ holds the templates, their style and script

codec_costs    the benchmark of codecs: table, page and figure
link_accuracy  the grid of link accuracy: tables and page
maps           which codec to take over which link, over a grid of rate and delay
experiments    what the figure programs of experiments/ share
csv_rows       the tables that programs of experiments write and go on with
experiment_tables    the CSVs that every experiment commits: seeds, tuning, certificates, comparisons
experiment_verdicts  comparisons and verdicts from those rows, and what a README says of them
predicted      what the figure programs of predicted experiments share
claims         published claims, what was measured, and the verdict
claim_rows     the rows of claims.toml: what decides a claim, and the rule
blocks         generated blocks of Markdown pages
"""
