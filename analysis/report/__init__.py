"""The report: tables in three formats, figures, and the page that shows them."""
