"""The forms in which users write what one op of ours computes: a folder for each kind of op, and what all of them share.

reading.py  a value up to casts and numbers, and the pairs in which an op of two may be read
guards.py   what must hold around a form: nobody else reads what is between, and no memory is written meanwhile
match.py    a form that was found, and how passes look for forms and write ops in their place
"""
