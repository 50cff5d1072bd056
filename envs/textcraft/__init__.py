"""TextCraft-Synth: craft items from a recipe graph, alone or by delegation."""
