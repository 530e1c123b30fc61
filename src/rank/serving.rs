//! The settings of serving: what a training run and `legorl-rank serve` share. Like [`super::stages`], one
//! function a stage.

use crate::{
    config::settings::Settings,
    serve::{
        proxy::{router::RouterConfig, ProxyConfig},
        session_scheduler::SchedulerConfig,
    },
};
use anyhow::{bail, Context};
use std::{
    net::{SocketAddr, ToSocketAddrs},
    path::PathBuf,
};

/// Settings by which the user says what the native engine must hold.
const WINDOW: [&str; 3] = ["MAX_PROMPT", "MAX_RESP", "ROLLOUT_MAX_MODEL_LEN"];
const CACHE: &str = "ENGINE_KV_CACHE_TOKENS";
/// Tokens of a page of the engine's cache.
const PAGE: u64 = 16;
/// Share of the memory that is left beside the weights which a cache of computed size takes.
const CACHE_SHARE: u64 = 2;
/// The shortest window that is chosen where nothing was set.
const LEAST_WINDOW: u64 = 256;

/// What bounds a native engine that stands alone.
#[derive(Clone, Copy, Debug)]
pub struct NativeBounds {
    /// `max_position_embeddings` of the model.
    pub positions: u64,
    /// Bytes that a token takes in the cache.
    pub token_bytes: u64,
    /// Bytes that are taken whatever the cache's size: weights, states.
    pub fixed_bytes: u64,
    /// Free memory, bytes; `None` where it is not known.
    pub available: Option<u64>,
}

/// Sizes the engine of `legorl-rank serve`, which no preflight has looked at: the window is that of the settings,
/// at most the model's positions, and the cache holds `ENGINE_MAX_NUM_SEQS` windows, at most half of the memory that is
/// left. What was not set gives way; `is_set` tells.
///
/// # Errors
/// What was set does not fit; the error names the variables and the bytes.
pub fn fit_native(
    settings: &mut Settings,
    is_set: impl Fn(&str) -> bool,
    bounds: &NativeBounds,
) -> anyhow::Result<()> {
    let engine = &mut settings.engine;
    let pages = |tokens: u64| tokens.div_ceil(PAGE) * PAGE;
    let mut window = u64::from(engine.max_model_len).min(bounds.positions);
    let wanted = match is_set(CACHE) {
        true => engine.kv_cache_tokens,
        false => u64::from(engine.max_num_seqs) * pages(window),
    };
    let mut cache = wanted;
    if let Some(available) = bounds.available {
        let left = available.saturating_sub(bounds.fixed_bytes);
        // What the user asked for may take all of it; what is computed takes a share.
        let most = |share: u64| left / share / bounds.token_bytes.max(1) / PAGE * PAGE;
        let named: Vec<&str> = WINDOW.into_iter().filter(|name| is_set(name)).collect();
        let refuse = |names: &str, tokens: u64, advice: &str| -> anyhow::Result<()> {
            bail!(
                "{names}: a KV cache of {tokens} tokens takes {} bytes, and {left} bytes of memory are left beside {} \
                 for weights and the states of ENGINE_MAX_NUM_SEQS={} sequences; {advice}",
                tokens.saturating_mul(bounds.token_bytes),
                bounds.fixed_bytes,
                engine.max_num_seqs,
            )
        };
        if is_set(CACHE) {
            if cache > most(1) {
                refuse(&format!("{CACHE}={cache}"), cache, "lower it, or leave it out")?;
            }
        } else {
            cache = wanted.min(most(CACHE_SHARE));
            if cache < window && !named.is_empty() {
                cache = pages(window);
                if cache > most(1) {
                    refuse(&named.join(" + "), cache, "lower them, or leave them out")?;
                }
            } else if cache < window {
                window = cache;
                if window < LEAST_WINDOW.min(bounds.positions) {
                    refuse(
                        "MODEL_PATH",
                        pages(LEAST_WINDOW),
                        "free memory or lower ENGINE_MAX_NUM_SEQS",
                    )?;
                }
            }
        }
    }
    if cache < window {
        bail!(
            "{CACHE}={cache} cannot hold one sequence of {window} tokens; raise it, or lower MAX_PROMPT + MAX_RESP"
        );
    }
    // Both came from smaller numbers or from the settings.
    engine.max_model_len = u32::try_from(window).unwrap_or(u32::MAX);
    engine.kv_cache_tokens = cache;
    Ok(())
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preflight::rules::testing::settings;

    const GIB: u64 = 1 << 30;

    fn fit(set: &[&str], bounds: NativeBounds) -> anyhow::Result<(u64, u64)> {
        let mut settings = settings(set);
        let is_set = |name: &str| set.iter().any(|s| s.starts_with(&format!("{name}=")));
        fit_native(&mut settings, is_set, &bounds)?;
        let engine = &settings.engine;
        Ok((u64::from(engine.max_model_len), engine.kv_cache_tokens))
    }

    /// A policy of a million parameters with 2,048 positions, on a machine with 8 GiB left.
    const SMALL: NativeBounds = NativeBounds {
        positions: 2048,
        token_bytes: 3072,
        fixed_bytes: 8 << 20,
        available: Some(8 * GIB),
    };

    #[test]
    fn an_engine_alone_is_as_large_as_model_and_memory_allow() {
        let window = ["MAX_PROMPT=30000", "MAX_RESP=170000"];
        assert_eq!(fit(&window, SMALL).unwrap(), (2048, 64 * 2048));
        // Less memory: the cache gives way, not the window.
        let tight = NativeBounds {
            available: Some(GIB / 8),
            ..SMALL
        };
        let (length, cache) = fit(&window, tight).unwrap();
        assert_eq!(length, 2048);
        assert!(
            (2048..=(GIB / 16) / 3072).contains(&cache) && cache % PAGE == 0,
            "{cache}"
        );
        // What was set is taken.
        let set = ["MAX_PROMPT=100", "MAX_RESP=100", "ENGINE_KV_CACHE_TOKENS=5000"];
        assert_eq!(fit(&set, tight).unwrap(), (200, 5000));
    }

    #[test]
    fn a_window_that_nobody_set_shrinks_and_one_that_was_set_is_an_error() {
        let large = NativeBounds {
            positions: 262_144,
            token_bytes: 229_376,
            fixed_bytes: 3 * GIB,
            available: Some(19 * GIB),
        };
        let mut nothing = settings(&["MAX_PROMPT=30000", "MAX_RESP=170000"]);
        fit_native(&mut nothing, |_| false, &large).unwrap();
        let engine = &nothing.engine;
        assert_eq!(u64::from(engine.max_model_len), engine.kv_cache_tokens);
        assert!(engine.kv_cache_tokens * 229_376 <= 8 * GIB && engine.max_model_len > 30_000);
        let error = fit(&["MAX_PROMPT=30000", "MAX_RESP=170000"], large)
            .unwrap_err()
            .to_string();
        for part in ["MAX_PROMPT + MAX_RESP", "45875200000 bytes", "17179869184 bytes"] {
            assert!(error.contains(part), "no `{part}` in {error}");
        }
        // More than the share that is taken without being asked, and there.
        assert_eq!(
            fit(&["MAX_RESP=40000", "MAX_PROMPT=10000"], large).unwrap(),
            (50_000, 50_000)
        );
        let error = fit(&["ENGINE_KV_CACHE_TOKENS=1000000", "MAX_RESP=512"], large).unwrap_err();
        assert!(
            error.to_string().contains("ENGINE_KV_CACHE_TOKENS=1000000"),
            "{error}"
        );
        let error = fit(&["ENGINE_KV_CACHE_TOKENS=64", "MAX_RESP=512"], large).unwrap_err();
        assert!(error.to_string().contains("cannot hold one sequence"), "{error}");
        let none = NativeBounds {
            available: Some(3 * GIB),
            ..large
        };
        let error = fit_native(&mut nothing, |_| false, &none)
            .unwrap_err()
            .to_string();
        assert!(error.contains("ENGINE_MAX_NUM_SEQS"), "{error}");
    }
}
