#!/bin/bash
set -e
cd /app
mkdir grape shell
