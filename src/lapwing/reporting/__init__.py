"""`report`: what a posterior knows and what it does not, as one HTML page with pictures and plain language.

predictions   targets and what was predicted for them, by kind of target
observations  predictions for held-out data, gathered over a loader
statistics    the figures, as plain dictionaries
pictures      figures as SVG
words         figures as sentences
page          all of it as one file
"""

from lapwing.reporting.figures import collect
from lapwing.reporting.posterior_report import report

__all__ = ["collect", "report"]
