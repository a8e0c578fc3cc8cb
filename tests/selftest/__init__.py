"""The test of the verification itself: ``make self-test``."""
