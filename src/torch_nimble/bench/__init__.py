"""Measuring torch-nimble beside its peers, and showing what was found.

suites.py says what is measured, systems.py by whom, worker.py measures in a process of its own,
runner.py starts those and keeps the record (record.py), page.py and tables.py show it.
"""
