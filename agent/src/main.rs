//! Static helper inside a sandbox.
fn main() {}
