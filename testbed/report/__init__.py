"""Reports on the runs of a sweep, as a table, figures and HTML pages. Reads results, runs nothing.

collect        groups comparable runs
entry          the runs of one codec over one network, and their combined numbers
comparison     each codec compared with fp32 and bf16, with intervals
tables         the table of results, one row of COLUMNS for each number
conclusions    sentences computed from the numbers
findings       titles of figures, computed from the numbers
settings       the conditions of the runs, for the foot of every figure
live_checked   differences between played and live steps on this machine
remarks        caveats of codecs, shown wherever their name appears
numbers        numbers as text

style          colours, markers and dashes of codecs
canvas         the frame of every figure, and figures as PNG and SVG
labels         labels beside marks
bars           time, byte and efficiency figures
lines          loss figures
gantt          one step, stage by stage
trace_chart    the steps of a trace, lane by lane
utilisation    traffic of the links over time
certificates   a figure of requested against measured links; certificate_text writes one certificate
page           the HTML page with all figures
cell_page      a page for each cell
step_svg       one step as a small SVG, for a cell's page
index          a page that lists every sweep of a folder of results
against        a page that shows two result folders side by side
templates      writes pages; html/ holds the templates, their style and script

codec_costs    the benchmark of codecs: table, page and figure
link_accuracy  the grid of link accuracy: tables and page
plots          panels, ticks, levels, estimates and bands of the figures of experiments/
maps           the best codec for each link of a grid of rate and delay
experiments    shared by the figure programs of experiments/
floors         unigram and bigram floors of the experiments' texts, in figures and claims
publishing     runs a figure program: CSVs, figures, claims and the generated blocks of a README
exec_page      the report of a program in the nodes of a lab; exec_figure draws its links' traffic
experiment_tables    the CSVs that every experiment commits: seeds, tuning, certificates, comparisons
experiment_verdicts  comparisons and verdicts from those rows, and their form in a README
predicted      shared by the figure programs of predicted experiments
claims         published claims, measured values, and verdicts; evidence.toml: which say what a codec costs in loss
claim_rows     the rows of claims.toml, and the rule that decides a claim
blocks         generated blocks of Markdown pages
"""
