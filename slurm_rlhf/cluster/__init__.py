"""Where a run may run and who runs where: allocation or machine -> `Topology` -> `RankMap`. No torch, no numpy."""
