"""This machine: processes started and ended, what they hold, what they wrote."""
