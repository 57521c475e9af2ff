"""The ways on which buckets of weights travel, behind one seam."""
