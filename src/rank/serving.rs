//! The settings of serving: what a training run and `legorl-rank serve` share. Like [`super::stages`], one
//! function a stage.

use crate::{
    config::settings::Settings,
    serve::{
        proxy::{router::RouterConfig, ProxyConfig},
        session_scheduler::SchedulerConfig,
    },
};
use anyhow::Context;
use std::{
    net::{SocketAddr, ToSocketAddrs},
    path::PathBuf,
};

/// Admission and balancing.
pub fn router(settings: &Settings) -> RouterConfig {
    let s = &settings.scheduler;
    RouterConfig {
        scheduler: SchedulerConfig {
            enabled: s.enabled,
            high_watermark: s.high_watermark,
            hit_threshold: s.hit_threshold,
            idle_grace: s.idle_grace,
            ..SchedulerConfig::default()
        },
        wait_poll: s.wait_poll,
        ..RouterConfig::default()
    }
}

/// The address that `PROXY_HOST` and `PROXY_PORT` name.
pub fn address(settings: &Settings) -> anyhow::Result<SocketAddr> {
    let p = &settings.proxy;
    (p.host.as_str(), p.port)
        .to_socket_addrs()
        .with_context(|| format!("PROXY_HOST={}", p.host))?
        .next()
        .with_context(|| format!("PROXY_HOST={} has no address", p.host))
}

/// The proxy, on these addresses.
pub fn proxy(settings: &Settings, tcp: SocketAddr, unix_socket: PathBuf) -> ProxyConfig {
    let (p, model) = (&settings.proxy, &settings.model);
    ProxyConfig {
        tcp: Some(tcp),
        tool_call_parser: model.tool_call_parser.name().to_owned(),
        max_body_bytes: p.max_request_body_bytes,
        train_branches: p.train_branches.clone(),
        max_session_tokens: p.max_session_tokens,
        ..ProxyConfig::new(unix_socket, model.served_model_name.clone(), model.path.clone())
    }
}
