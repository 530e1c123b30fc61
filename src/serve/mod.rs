//! Serving: the proxy that agents talk to, admission, balancing, and the engines behind it.

pub mod balancer;
pub mod engine;
pub mod proxy;
pub mod session_scheduler;
