"""What a scientific statement about runs needs: experiments, comparisons, claims. `cory` never imports it."""
