//! Network policy of a task: `network_mode` and `allowed_hosts`.

use super::reader::Fields;
use serde::Serialize;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What a sandbox may reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkMode {
    /// Nothing but the session's proxy.
    NoNetwork,
    /// Everything.
    #[default]
    Public,
    /// The hosts of `allowed_hosts`.
    Allowlist,
}

/// Network policy of one section; `mode` is `None` where the section does not override it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NetworkPolicy {
    /// Mode, if the section sets one.
    pub mode: Option<NetworkMode>,
    /// Host names, `*.` patterns, addresses or address ranges, in lower case.
    pub allowed_hosts: Vec<String>,
}

/// Takes both fields of a section. `default` is the mode of a section without `network_mode`.
pub(super) fn take_policy(fields: &mut Fields<'_>, default: Option<NetworkMode>) -> NetworkPolicy {
    let mut mode = default;
    if let Some(node) = fields.take("network_mode") {
        if let Some(text) = node.string() {
            mode = match text.as_str() {
                "no-network" => Some(NetworkMode::NoNetwork),
                "public" => Some(NetworkMode::Public),
                "allowlist" => Some(NetworkMode::Allowlist),
                other => {
                    node.error(format!(
                        "is `{other}`; it must be no-network, public or allowlist"
                    ));
                    mode
                }
            };
        }
    }
    let mut allowed_hosts = Vec::new();
    if let Some(node) = fields.take("allowed_hosts") {
        let items = node.list().unwrap_or_default();
        for item in &items {
            let Some(text) = item.string() else { continue };
            match normalize_host(&text) {
                Ok(host) => allowed_hosts.push(host),
                Err(problem) => item.error(format!("`{text}`: {problem}")),
            }
        }
        let wrong = match mode {
            Some(NetworkMode::Allowlist) => false,
            // An override without a mode may not even hold an empty list.
            None => true,
            Some(_) => !items.is_empty(),
        };
        if wrong {
            node.error("is only valid together with network_mode = \"allowlist\"");
        }
    }
    NetworkPolicy { mode, allowed_hosts }
}

/// Checks an entry and gives its normal form.
fn normalize_host(entry: &str) -> Result<String, &'static str> {
    const NOT_A_HOST: &str =
        "must be a host name, an address or an address range, without scheme, port or path";
    let host = entry.trim().to_lowercase();
    let host = host.trim_end_matches('.');
    if host.is_empty() {
        return Err("is empty");
    }
    if host.contains('/') {
        return network(host).ok_or(NOT_A_HOST);
    }
    if host.contains(':') {
        let address: Ipv6Addr = host.parse().map_err(|_| NOT_A_HOST)?;
        return Ok(address.to_string());
    }
    if host.contains(['[', ']']) {
        return Err(NOT_A_HOST);
    }
    let name = match host.strip_prefix("*.") {
        Some("") => return Err("needs a host name after `*.`"),
        Some(suffix) if suffix.parse::<Ipv4Addr>().is_ok() => {
            return Err("`*.` goes before a host name, not before an address")
        }
        Some(suffix) => suffix,
        None if host.contains('*') => return Err("a wildcard is only allowed as a leading `*.`"),
        None => host,
    };
    if name.split('.').all(is_label) {
        Ok(host.to_owned())
    } else {
        Err(NOT_A_HOST)
    }
}

fn is_label(label: &str) -> bool {
    (1..=63).contains(&label.len())
        && label
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// `address/prefix` or `address/netmask` without host bits.
fn network(text: &str) -> Option<String> {
    let (address, prefix) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    let width: u32 = if address.is_ipv4() { 32 } else { 128 };
    let bits = match address {
        IpAddr::V4(a) => u128::from(a.to_bits()),
        IpAddr::V6(a) => a.to_bits(),
    };
    let length = match prefix.parse::<Ipv4Addr>() {
        Ok(mask) if address.is_ipv4() => {
            let mask = mask.to_bits();
            let length = mask.leading_ones();
            let host_length = mask.leading_zeros();
            if mask == u32::MAX.checked_shl(32 - length).unwrap_or(0) {
                length
            } else if mask == u32::MAX.checked_shr(host_length).unwrap_or(0) {
                host_length
            } else {
                return None;
            }
        }
        _ if prefix.bytes().all(|b| b.is_ascii_digit()) => prefix.parse().ok()?,
        _ => return None,
    };
    let host_bits = width.checked_sub(length)?;
    let host_mask = if host_bits == 128 {
        u128::MAX
    } else {
        (1 << host_bits) - 1
    };
    (bits & host_mask == 0).then(|| format!("{address}/{length}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_normalized_or_refused() {
        for (entry, normal) in [
            (" Example.COM. ", "example.com"),
            ("*.example.com", "*.example.com"),
            ("192.0.2.1", "192.0.2.1"),
            ("2001:DB8:0:0::1", "2001:db8::1"),
            ("192.0.2.0/24", "192.0.2.0/24"),
            ("192.0.2.0/255.255.255.0", "192.0.2.0/24"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("::/0", "::/0"),
        ] {
            assert_eq!(normalize_host(entry).as_deref(), Ok(normal), "{entry}");
        }
        for entry in [
            "",
            ".",
            "https://example.com",
            "example.com:80",
            "[2001:db8::1]",
            "*.192.0.2.1",
            "*.",
            "a.*.b",
            "192.0.2.1/24",
            "192.0.2.0/33",
            "-a.b",
            "a_b.c",
            "a..b",
        ] {
            assert!(normalize_host(entry).is_err(), "{entry}");
        }
    }
}
