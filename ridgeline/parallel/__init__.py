"""Several devices on one model: how many may share it, who they are, what each of them holds."""
