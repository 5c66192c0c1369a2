"""Floor 2: what a training needs when machines fail. Chapter 19.

Read the modules in this order:

"""
