"""The OpenAI-compatible server: protocol, routes, streaming, metrics and the page.

Needs the extra `serve`; nothing outside this folder and its verb imports it.
"""
