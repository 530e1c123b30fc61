//! The proxy.
pub mod capture;
pub mod router;

/// Seed.
pub fn mix_seed(seed: u64, branch: u64, turn: u64) -> u64 {
    seed ^ branch ^ turn
}
