"""The Lightning side, tested with real Trainers. A package, so that file names may repeat those of other folders."""
