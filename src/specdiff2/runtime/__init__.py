"""Entry points' side of SpecDiff-2: configuration, provenance, seeding, logging and the wiring of a run."""
