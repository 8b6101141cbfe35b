"""`report`: what a posterior knows and what it does not, as one HTML page with pictures and plain language.

posterior_report  report: the page for any posterior
table_report      report_table: the page for a fitted table
observations      predictions for held-out data, gathered over a loader
predictions       targets and what was predicted for them, a class for each kind of target
statistics        the figures, a function for each part of the page
figures           collect: all figures as one dictionary
pictures          figures as SVG
comparison        compare: several posteriors side by side, as a table and a picture
words             figures as sentences
page              figures, pictures and words as one HTML file, from templates/
"""

from lapwing.reporting.comparison import Comparison, compare
from lapwing.reporting.figures import collect
from lapwing.reporting.posterior_report import report

__all__ = ["Comparison", "collect", "compare", "report"]
