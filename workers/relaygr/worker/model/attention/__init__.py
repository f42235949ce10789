"""Attention over K,V in pages: one interface (`interface.py`), and a back end for each device and mask.

    A[i,h] = sum_j mask(i,j) * SiLU(alpha * Q[i,h].K[j,h] [+ bias(i,j)]) / N * V[j,h]        or a soft-max over j

SiLU attention has no row sum, so every key adds its own term and partial sums over blocks of keys are exact: K,V that
were kept give what K,V computed again would give. Formula: arXiv 2402.17152, section 3. Which back end runs is chosen
once, at load (`choose.py`).
"""
