//! Lego-RL
pub mod base;
pub mod cli;
pub mod comm;
pub mod config;
pub mod model;
pub mod observe;
pub mod plan;
pub mod preflight;
pub mod rank;
pub mod rollout;
pub mod serve;
pub mod train;
