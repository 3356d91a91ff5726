"""Plots of recorded metrics, one per file.

`_history` reads the records, and `_style` draws what the plots share.
"""
