def case(*_): return ''
case_of_masks = many_ranks = memory = case
