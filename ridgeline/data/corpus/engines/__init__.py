"""What runs the tasks of a build: this process, several, or those of a Ray cluster. The bytes are
the same.
"""
