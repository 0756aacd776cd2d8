"""`report.html`: the report as one file that a browser opens without a network."""
