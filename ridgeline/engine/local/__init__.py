"""The engine's steps in this process: the main loop, and the model on one rank or several."""
