"""What a step is made of once it is planned: the plan flattened and copied into tensors, in one
copy to the device. Attention, sampling and execution read what is made here.
"""
