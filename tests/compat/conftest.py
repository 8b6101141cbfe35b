"""The scripts are programs, not modules of the suite: `test_scripts.py` runs them."""

collect_ignore_glob = ["scripts/*"]
