"""The published TextCraft-Synth records; see LICENSE beside them."""
