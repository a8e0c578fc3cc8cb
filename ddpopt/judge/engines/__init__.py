"""The ways to run a data-parallel step: torch's, ddpopt's, those of frameworks, and those of the user.

`engine` says what an engine is, `modes` finds one by its name, `meshes` lays ranks out in rows and columns.
"""
