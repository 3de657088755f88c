"""From a plugin's name to the calls of the loop: find, load, check, order, register, compile."""
