"""The kit that keeps codecs honest, ours and a stranger's: `python -m testbed codecs check NAME`.

`checks` lists what is asked, one function each; `suite` asks it of a codec in both directions; `claims` is what a class may say
of itself beyond `base`'s contract so that it can be held to it.
"""
