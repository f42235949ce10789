"""Attention over K,V in pages: one interface (`interface.py`), and back ends for devices and masks.

    A[i,h] = sum_j mask(i,j) * SiLU(alpha * Q[i,h].K[j,h] [+ bias(i,j)]) / N * V[j,h]        or a soft-max over j

SiLU attention has no row sum: every key adds its own term, and partial sums over blocks of keys are exact. Cached K,V
therefore give the same result as K,V computed again. Formula: arXiv 2402.17152, section 3. `choose.py` chooses the back
end once, at load.
"""
