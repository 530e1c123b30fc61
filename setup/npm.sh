# Sourced by other scripts of this folder: packages of the npm registry, fetched by curl and verified, so that
# neither npm nor Node.js is needed. The registry is npm's: NPM_CONFIG_REGISTRY, ~/.npmrc, or npm's default.
# The caller defines `die MESSAGE`.

npm_registry() {
  local url=${NPM_CONFIG_REGISTRY:-${npm_config_registry:-}}
  [ -n "$url" ] || url=$(sed -n 's/^registry *= *//p' "$HOME/.npmrc" 2>/dev/null | tail -n 1)
  url=${url:-https://registry.npmjs.org}
  printf '%s' "${url%/}"
}

# npm_integrity PACKAGE VERSION: the registry's `dist.integrity`.
npm_integrity() {
  local found
  found=$(curl -sSfL --retry 3 --connect-timeout 20 --max-time 120 "$(npm_registry)/${1/\//%2f}/$2") \
    || die "the npm registry has no description of $1 $2, or cannot be reached"
  found=$(grep -o '"integrity" *: *"sha512-[^"]*"' <<<"$found" | head -n 1 | grep -o 'sha512-[^"]*') || true
  [ -n "$found" ] || die "the npm registry gives no SHA-512 of $1 $2"
  printf '%s' "$found"
}

# npm_fetch PACKAGE VERSION INTEGRITY FOLDER: downloads, compares with `sha512-<base64>`, and unpacks into
# FOLDER. An empty INTEGRITY takes the registry's own.
npm_fetch() {
  local package=$1 version=$2 integrity=$3 folder=$4 file want got
  [ -n "$integrity" ] || integrity=$(npm_integrity "$package" "$version") || exit 1
  mkdir -p "$folder"
  file=$folder/.package.tgz
  curl -sSfL --retry 3 --connect-timeout 20 --max-time 1800 --speed-limit 1000 --speed-time 60 -o "$file" \
    "$(npm_registry)/$package/-/${package##*/}-$version.tgz" \
    || die "$package $version could not be downloaded from the npm registry"
  want=$(base64 -d <<<"${integrity#sha512-}" | od -An -v -tx1 | tr -d ' \n')
  got=$(sha512sum "$file"); got=${got%% *}
  [ "$want" = "$got" ] || die "$package $version: the download's SHA-512 is $got and must be $want"
  tar -xzf "$file" -C "$folder" --strip-components=1 --no-same-owner
  rm -f "$file"
}
