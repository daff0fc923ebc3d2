"""The lessons, one file each, in the percent format that editors and Jupyter know (`# %%`).

`# %% [markdown]` holds prose, `# %%` code that runs, `# %% [picture]` code that draws the page's
picture, `# %% [exercise]` the exercise with its solution, `# %% [check]` the cases that it is held
to. source.py reads them; a new lesson is a new file with the next number.
"""
