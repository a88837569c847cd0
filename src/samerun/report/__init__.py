"""The report: a run directory as one self-contained HTML page, readable from disk, with nothing fetched.

samerun.report.model     reads whatever a run directory holds, and notes what it lacks
samerun.report.state     coverage by role, and every parameter's row
samerun.report.layout    layouts, and which rank owns which slice of a tensor before and after
samerun.report.batch     batch options as dealt slots
samerun.report.samples   which replica consumed which sample, across the seam
samerun.report.charts    numbers per update as curves, deviations and bands
samerun.report.findings  findings of one code together, with the catalogue's words
samerun.report.verdict   the verdict in words, criteria, and how much of each band was used
samerun.report.memory    memory as bars
samerun.report.transition, provenance   where the run goes; what was sealed and what ran
samerun.report.page      all of these as one value: what the templates show
samerun.report.html      the page as text
"""
