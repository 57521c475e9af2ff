"""Checkpoints that are either whole or not there: written aside, recorded in a manifest, renamed into place."""
