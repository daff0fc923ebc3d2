"""Clusters as plans read them: pools of GPUs, their nodes and the network between them."""
